"""torch's generic device tests for loom, run as a script by test_torch_generic.py: torch.testing's
operator database and its PrivateUse1 test base, in a process of their own, since torch builds them
when they are imported. Prints what was run as one line of JSON."""

# ruff: noqa: PT009 - torch's TestCase compares tensors by assertEqual

from __future__ import annotations

import json
import sys
import unittest
from collections import Counter
from types import SimpleNamespace

import torch

import weft.loom

weft.loom.load(heap=512)

# torch's test utilities derive their TestCase from this package's, which only adds what is not used
# here.
sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))

from torch.testing._internal.common_device_type import (  # noqa: E402
    dtypes,
    instantiate_device_type_tests,
    ops,
)
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_utils import TestCase, gradcheck  # noqa: E402

CREATION = (
    "arange empty_like eye full full_like linspace logspace new_empty new_full new_ones new_zeros "
    "ones ones_like scalar_tensor zeros zeros_like tril triu tril_indices triu_indices"
)
VIEWS = (
    "as_strided broadcast_to chunk diagonal expand expand_as flatten movedim narrow permute ravel "
    "reshape select split squeeze swapaxes t tensor_split transpose unbind unflatten unfold "
    "unsqueeze view view_as view_as_real H T mT"
)
COPIES = "clone contiguous to cat stack hstack vstack flip roll repeat tile byte float int"
INDEXING = (
    "__getitem__ gather index_add index_copy index_fill index_put index_select masked_fill "
    "masked_select nonzero put scatter scatter_add take take_along_dim where argwhere"
)
ARITHMETIC = (
    "abs add addmm argmax bmm clamp cumsum div dot eq exp log matmul max mean min mm mul neg pow "
    "prod reciprocal sigmoid sort sqrt sub sum tanh topk var nn.functional.relu nn.functional.gelu "
    "nn.functional.linear nn.functional.layer_norm nn.functional.softmax nn.functional.embedding "
    "nn.functional.cross_entropy softmax log_softmax"
)
NAMES = set(" ".join((CREATION, VIEWS, COPIES, INDEXING, ARITHMETIC)).split())
# Partial views are of a larger storage, of which a copy to the host takes only what they show.
CHOSEN = [op for op in op_db if op.name in NAMES and op.variant_test_name != "partial_views"]
# Computed in other steps than the host's own kernel; the tolerance is that of torch's own test of
# a device against the host.
TOLERANCE = {"nn.functional.layer_norm": {"atol": 1e-3, "rtol": 1e-3}}
UNDEFINED = {"empty_like", "new_empty"}  # what they hold is anything
SAMPLES = 12
counts: Counter[str] = Counter()


def to_host(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)):
        return [to_host(v) for v in value]
    return value


def host_sample(sample):
    return sample.transform(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x)


class TestGeneric(TestCase):
    """Operators of the database give on loom what they give on the host."""

    def samples(self, op, device, dtype, **options):
        for i, sample in enumerate(op.sample_inputs(device, dtype, **options)):
            if i == SAMPLES:
                break
            yield sample

    @ops(CHOSEN, allowed_dtypes=(torch.float32, torch.int64, torch.bool, torch.complex64))
    def test_like_the_host(self, device, dtype, op):
        for sample in self.samples(op, device, dtype):
            on_host = host_sample(sample)
            if "device" in on_host.kwargs:
                on_host.kwargs["device"] = "cpu"
            here = op(sample.input, *sample.args, **sample.kwargs)
            there = op(on_host.input, *on_host.args, **on_host.kwargs)
            if op.name in UNDEFINED:
                self.assertEqual(here.shape, there.shape)
            else:
                self.assertEqual(to_host(here), to_host(there), **TOLERANCE.get(op.name, {}))
            counts["samples"] += 1

    @ops([op for op in CHOSEN if op.supports_autograd], allowed_dtypes=(torch.float32,))
    def test_gradients_like_the_host(self, device, dtype, op):
        for sample in self.samples(op, device, dtype, requires_grad=True):
            on_host = host_sample(sample)
            leaves = [t for t in (sample.input, *sample.args) if _is_leaf(t)]
            if not leaves:
                continue
            twins = [t.detach().cpu().requires_grad_() for t in leaves]
            swap = {id(a): b for a, b in zip(leaves, twins, strict=True)}
            there_input = swap.get(id(sample.input), on_host.input)
            there_args = [
                swap.get(id(a), b) for a, b in zip(sample.args, on_host.args, strict=True)
            ]
            here = _sum(op(sample.input, *sample.args, **sample.kwargs))
            there = _sum(op(there_input, *there_args, **on_host.kwargs))
            if here is None or not here.requires_grad:
                continue
            mine = torch.autograd.grad(here, leaves, allow_unused=True)
            theirs = torch.autograd.grad(there, twins, allow_unused=True)
            close = TOLERANCE.get(op.name, {})
            self.assertEqual(to_host(list(mine)), to_host(list(theirs)), **close)
            counts["gradients"] += 1

    @dtypes(torch.float64)
    def test_gradcheck(self, device, dtype):
        x = torch.randn(3, 4, device=device, dtype=dtype, requires_grad=True)
        w = torch.randn(4, 2, device=device, dtype=dtype, requires_grad=True)
        self.assertTrue(gradcheck(lambda x, w: (x @ w).tanh().sum(), (x, w)))

    @dtypes(torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.bool)
    def test_copies_between_devices(self, device, dtype):
        for shape in ((), (0,), (5,), (3, 4), (2, 3, 5)):
            host = torch.testing.make_tensor(shape, dtype=dtype, device="cpu")
            there = host.to(device)
            self.assertEqual(there.cpu(), host)
            self.assertEqual(there.clone().cpu(), host)
            if host.dim() == 2:
                self.assertEqual(there.t().cpu(), host.t())
                self.assertEqual(there.t().contiguous().cpu(), host.t().contiguous())
            double = there.to(torch.float64)
            self.assertEqual(double.cpu(), host.to(torch.float64))
            self.assertEqual(torch.empty(shape, dtype=torch.float64).copy_(there), double.cpu())

    def test_views_share_memory(self, device):
        x = torch.zeros(4, 6, device=device)
        for view in (x[1], x[:, 2], x.t()[3], x.view(24)[5:], x.unfold(1, 2, 2), x.diagonal()):
            self.assertEqual(view.untyped_storage().data_ptr(), x.untyped_storage().data_ptr())
            view.add_(1)
        host = torch.zeros(4, 6)
        for view in (
            host[1],
            host[:, 2],
            host.t()[3],
            host.view(24)[5:],
            host.unfold(1, 2, 2),
            host.diagonal(),
        ):
            view.add_(1)
        self.assertEqual(x.cpu(), host)

    def test_random_numbers_follow_the_seed(self, device):
        torch.manual_seed(3)
        first = torch.randn(5, device=device)
        torch.manual_seed(3)
        self.assertEqual(first, torch.randn(5, device=device))
        generator = torch.Generator(device).manual_seed(7)
        a = torch.rand(4, device=device, generator=generator)
        generator.manual_seed(7)
        self.assertEqual(a, torch.rand(4, device=device, generator=generator))

    def test_serialisation(self, device):
        import io

        buffer = io.BytesIO()
        x = torch.arange(6.0, device=device)
        torch.save(x, buffer)
        buffer.seek(0)
        self.assertEqual(torch.load(buffer), x)

    def test_printing(self, device):
        text = str(torch.arange(3.0, device=device))
        self.assertIn("device='loom", text)
        self.assertIn("2.", text)


def _is_leaf(value):
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _sum(value):
    if isinstance(value, torch.Tensor):
        return value.real.sum() if value.is_complex() else value.sum()
    parts = [_sum(v) for v in value if isinstance(v, torch.Tensor) and v.requires_grad]
    return sum(parts) if parts else None


instantiate_device_type_tests(TestGeneric, globals(), only_for="privateuse1")


if __name__ == "__main__":
    suite = unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"])
    result = unittest.TextTestRunner(verbosity=0, stream=sys.stderr).run(suite)
    wrong = [str(test).split()[0] for test, _ in (*result.failures, *result.errors)]
    found = {
        "run": result.testsRun,
        "skipped": len(result.skipped),
        "wrong": wrong,
        "operators": len({op.name for op in CHOSEN}),
        "samples": counts["samples"],
        "gradients": counts["gradients"],
    }
    print(json.dumps(found))
