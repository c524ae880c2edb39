"""Check the contracts of methods, models, data sets and partitions in your own tests.

    from consilium.testing import check_method

    def test_mine_keeps_what_a_method_promises():
        check_method(Mine, mu=0.5)

federation  three small silos with random images, for these checks and your own tests
methods     the contract of methods; our own methods pass the same checks
others      the contracts of models, data sets and partitions
"""

from service_core.progress import still_working

with still_working("loads PyTorch"):
    from consilium.testing.methods import check_method
    from consilium.testing.others import check_data, check_model, check_partition

__all__ = ["check_data", "check_method", "check_model", "check_partition"]
