"""Measurements on this machine: rank processes, emulated links and hosts, interleaved arms, and the
probes with which calibration describes the machine."""
