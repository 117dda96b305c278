"""Which packages the wheel holds; everything else about the project is in pyproject.toml.

`recipes/` and `configs/` stand at the top of the repository, where people read them, and travel inside the package as
`hf_fsdp/shipped/`, so that `hf-fsdp recipes copy` finds them after `pip install`. pyproject.toml says where they are
(package-dir) and what of them is taken (package-data); it cannot add packages to those that are found.
"""

from setuptools import find_packages, setup

SHIPPED = ["hf_fsdp.shipped.recipes", "hf_fsdp.shipped.configs"]

setup(packages=[*find_packages(include=["hf_fsdp", "hf_fsdp.*"]), *SHIPPED])
