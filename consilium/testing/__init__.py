"""What methods, models, data sets and partitions owe, as functions for your own tests.

    from consilium.testing import check_method

    def test_mine_keeps_what_a_method_promises():
        check_method(Mine, mu=0.5)

federation  three small silos with made-up images, for these checks and for tests of your own
methods     a method under test, and its contract; our own ones pass the same checks
others      the contracts of models, data sets and partitions
"""

from service_core.progress import still_working

with still_working("loads PyTorch"):
    from consilium.testing.methods import check_method
    from consilium.testing.others import check_data, check_model, check_partition

__all__ = ["check_data", "check_method", "check_model", "check_partition"]
