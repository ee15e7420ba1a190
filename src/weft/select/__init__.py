"""Which schedule: by a rule from static sizes, by simulating, by what was measured here."""
