"""A fabric in one file outside the package: the usual one of the machine, which counts its calls.

It implements `weft.fabric.Fabric` by composition: what it does not change, it passes on.
"""

from dataclasses import replace

from weft.fabric import open_on_cpu, register


class CountedFabric:
    """Counts the calls that ranks enter."""

    def __init__(self, group, device):
        self._inner = open_on_cpu(group, device)
        self.can = replace(self._inner.can, name="counted")
        self.num_calls = 0

    def call(self, *arguments, **options):
        self.num_calls += 1
        return self._inner.call(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self._inner, name)


register("cpu", CountedFabric, kind="counted")
