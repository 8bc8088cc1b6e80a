"""What `import sidestream` offers is what it says it offers."""

import ast
import subprocess
import sys
from pathlib import Path

import sidestream
import sidestream_kv
import sidestream_order
from sidestream import errors


def test_every_exported_name_exists_and_the_list_is_sorted_and_complete() -> None:
    assert all(getattr(sidestream, name) is not None for name in sidestream.__all__)
    assert sidestream.__all__ == sorted(set(sidestream.__all__), key=lambda name: (name != "LLM", name))
    imported = {name for name, value in vars(sidestream).items() if isinstance(value, type)}
    assert imported | set(sidestream._LAZY) == set(sidestream.__all__)


def test_every_error_is_exported_and_has_the_one_root() -> None:
    tree = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert tree <= set(sidestream.__all__)
    assert all(issubclass(getattr(sidestream, name), sidestream.SidestreamError) for name in tree)


def test_no_package_exports_a_name_that_hides_one_of_its_modules() -> None:
    """After `from package.hunt import hunt`, `package.hunt` is a function, and the module cannot be reached."""
    hidden = list[str]()
    roots = [Path(package.__file__).parent for package in (sidestream, sidestream_kv, sidestream_order)]
    homes = {page: home for home in roots for page in home.rglob("__init__.py")}
    for page, root in homes.items():
        modules = {path.stem for path in page.parent.glob("*.py")} | {
            path.parent.name for path in page.parent.glob("*/__init__.py")
        }
        package = ".".join(page.parent.relative_to(root.parent).parts)
        for node in ast.parse(page.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module != package:
                hidden += [f"{package}.{name.name}" for name in node.names if (name.asname or name.name) in modules]
    assert hidden == []


def test_unknown_name_is_an_attribute_error() -> None:
    try:
        sidestream.LMM  # noqa: B018
    except AttributeError as error:
        assert "LMM" in str(error)
    else:
        raise AssertionError("sidestream.LMM should not exist")


def test_importing_the_package_imports_no_torch() -> None:
    subprocess.run([sys.executable, "-c", "import sidestream, sys; sys.exit('torch' in sys.modules)"], check=True)


def test_names_of_the_transfer_engine_exist_and_need_no_torch_before_their_use() -> None:
    assert all(getattr(sidestream_kv, name) is not None for name in sidestream_kv.__all__)
    imported = {name for name, value in vars(sidestream_kv).items() if isinstance(value, type)}
    assert imported - {"Any"} <= set(sidestream_kv.__all__) and set(sidestream_kv._LAZY) <= set(sidestream_kv.__all__)
    for package in ("sidestream", "transformers", "torch"):
        program = f"import sidestream_kv, sys; sys.exit({package!r} in sys.modules)"
        subprocess.run([sys.executable, "-c", program], check=True)
