"""How far values may differ for reasons of floating point alone; bounds of quantised values: quantization_bounds."""

# float32 has a unit roundoff of 6e-8. Sums over a batch of 168 in another order differ by about sqrt(168) * 6e-8 = 8e-7
# of a leaf's largest value, and five steps of Adam with a learning rate of 1e-2 keep that below 1e-5. What amplifies
# most in an optimizer is 1 - 0.999^t, of which the first step keeps 1/1000: 6e-5 of an update of some percent.
FLOAT32 = 1e-5
# The same through three layers whose gathered weights were quantised.
FLOAT32_QUANTIZED = 2e-5
# One rounding to bfloat16 is 2^-9. A gradient summed over 8 devices in bfloat16 is rounded once on each device and at
# most 7 times on the way: 8 * 2^-9. Over 4 devices, and rounded once more by the program itself: 5 * 2^-9.
BFLOAT16 = 2.0**-6
BFLOAT16_OF_4 = 5 * 2.0**-9
# Orthogonalisation (muon) repeats five matrix polynomials per step and amplifies rounding by up to the product of their
# slopes at small singular values, about 3.4^5 = 450 times the 1e-7 of a float32 product; several steps of it.
MUON = 5e-4
