"""One distribution, three packages, one extension module, one program."""

from setuptools import setup
from setuptools_rust import Binding, RustBin, RustExtension

PACKAGES = {
    "dcr": "rust/dcr-python/python/dcr",
    "dcr_vllm": "vllm_plugin/dcr_vllm",
    "dcr_training": "training_plugin/dcr_training",
}

setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    rust_extensions=[
        RustExtension(
            "dcr._native",
            path="rust/dcr-python/Cargo.toml",
            binding=Binding.PyO3,
            py_limited_api=True,
            features=["extension-module"],
        ),
        RustBin("dcr", path="rust/dcr-cli/Cargo.toml"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
