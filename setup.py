"""What pyproject.toml cannot say: which packages there are, and the one compiled file.

`m2po_megatron/kernels` is a symlink to the top-level `kernels/`, which has no `__init__.py`, so that no import name
`kernels` is taken (Hugging Face publishes a package of that name). It is found as a namespace package; wheel and sdist
hold its files themselves.

The compiled log-prob kernel is optional: without a compiler the installation succeeds and the torch one serves. It is a
plain shared library (no Python in it), named like an extension module so that every way of installing carries it.
"""

from setuptools import Extension, find_namespace_packages, setup

setup(
    packages=find_namespace_packages(include=["m2po_megatron", "m2po_megatron.*"]),
    package_data={"m2po_megatron.kernels": ["*.md"]},
    ext_modules=[
        Extension(
            "m2po_megatron.kernels._logprob_native",
            ["kernels/logprob_native.cpp"],
            depends=["kernels/logprob_native_rows.h"],
            # After the interpreter's own flags: NaN and infinity must stay what they are, and the same sources give the
            # same bytes wherever they are built (no debug information, which holds paths).
            extra_compile_args=[
                *("-std=c++17", "-O3", "-g0", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math"),
                *("-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-pthread"),
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
)
