"""Record-level differential privacy: what a method may reach of a hospital's examples, clipped, noised and charged."""
