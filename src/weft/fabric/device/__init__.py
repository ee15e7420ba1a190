"""The device fabric: plans as stream programs, chunks by copy engines, signals as words."""
