"""Float8 products on a device, where torch's own float8 GEMM makes them."""

from __future__ import annotations


def products():
    import torch

    from weft.run import scaled

    asked = []
    gemm = torch._scaled_mm

    def counted(a, b, *scales, out_dtype):
        asked.append([tuple(s.shape) for s in scales])
        return gemm(a.cpu(), b.cpu(), *(s.cpu() for s in scales), out_dtype=out_dtype).to("loom")

    torch._scaled_mm = counted
    generator = torch.Generator().manual_seed(0)
    results = []
    one, half = torch.ones(1, 1), torch.full((1, 1), 0.5)
    cases = (
        (5, 32, 16, one, half, True),  # one scale each
        (5, 32, 16, torch.arange(1.0, 6.0)[:, None], half, True),  # rows
        (6, 32, 16, torch.arange(1.0, 8.0)[1:, None], half, True),  # not at 16 bytes
        (5, 24, 16, one, half, True),  # no such GEMM: K is not a multiple of 16
        (5, 32, 16, one, half, False),  # no such GEMM: w by rows
    )
    for m, k, n, rows, columns, by_columns in cases:
        a, b = (torch.randint(-2, 3, s, generator=generator).float() for s in ((m, k), (k, n)))
        x, w = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        w = w.t().contiguous().t() if by_columns else w
        c = torch.empty(m, n, device="loom")
        there = w.t().contiguous().to("loom").t() if by_columns else w.to("loom")
        scaled.scaled_product(x.to("loom"), there, c, rows.to("loom"), columns.to("loom"))
        results.append(torch.equal(c.cpu(), (a @ b) * rows * columns))
    torch._scaled_mm = gemm
    return results, asked


def test_scaled_products(loom_pools):
    results, asked = loom_pools(1).run(products)[0]
    assert results == [True] * 5
    assert asked == [[(), ()], [(5, 1), (1, 16)], [(6, 1), (1, 16)]]
