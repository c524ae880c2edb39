"""Loss functions that several methods, or one large method, use: pure functions of logits and features."""
