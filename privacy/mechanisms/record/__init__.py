"""Record-level differential privacy: a method's only access to a hospital's examples, clipped, noised and charged."""
