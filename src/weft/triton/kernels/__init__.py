"""The kernels themselves, in the Triton language; the files beside this folder launch them."""
