"""The kernels themselves: block quantisation written for Pallas's Mosaic GPU backend, imported on first use."""
