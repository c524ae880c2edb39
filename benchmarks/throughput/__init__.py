"""Local training through the doors beside a bare PyTorch loop."""
