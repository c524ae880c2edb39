"""The mechanisms of differential privacy.

record/  clipped gradients, noisy class sums, private access to examples
silo/    one clipped and noised update per hospital
noise/   random sources, discrete Gaussian noise, rounding to integers
"""
