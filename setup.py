"""What pyproject.toml cannot say: in a wheel, the repository's folder `configs` lies inside `coordinator`."""

from setuptools import find_namespace_packages, setup

PACKAGES = ("consilium", "coordinator", "fl_core", "privacy", "protos", "service_core", "silo")
CONFIGS = "coordinator.configs"

setup(
    packages=[*find_namespace_packages(include=[word for name in PACKAGES for word in (name, f"{name}.*")]), CONFIGS],
    package_dir={CONFIGS: "configs"},
)
