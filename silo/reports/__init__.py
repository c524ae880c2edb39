"""What the hospital's page and its commands say alike: what left, what a run asks for, what was and would be spent.

None of it imports torch.
"""
