"""A schedule name in one file outside the package."""

from weft.schedule import Schedule, register

register("thirds", Schedule(depth=3, fusion="unfused"))
