"""The shape of the house: which room may import which, no circles, documented and typed public names."""

import ast
import inspect
import re
from itertools import takewhile

import pytest

import vitrel
from helpers import each
from helpers.sources import import_statements, sources, statements, trees

CORE = ["geometry", "grid", "position", "ops", "layers", "models"]  # each may import those before it
SHARED = {"common"}  # all may import it
ROOMS = {  # what else each room may import; all may import the core
    "any_size": set(),
    "weights": {"any_size"},
    "inputs": set(),
    "data": set(),
    "inspect": set(),
    "conformance": {"inspect"},
    "tasks": {"data"},
    "train": {"data", "weights", "inspect", "tasks"},
    "evaluate": {"data", "inspect", "weights", "tasks"},
    "export": {"any_size", "weights", "inspect", "evaluate"},  # the card of an upload has scores
    "compare": {"data", "weights", "train", "evaluate", "tasks"},
}
TOP = ("tools", "cli", "__main__", "__init__")  # may import everything


def imports(name):
    """Every module named in an import anywhere in the file; a relative one keeps its dots."""
    for node in import_statements(name):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            yield "." * node.level + (node.module or "")


def misplaced(name):
    """What a file imports against the order of the rooms."""
    part = name.split("/")[1].removesuffix(".py") if name.startswith("vitrel/") else "tools"
    if name.startswith("vitrel/") and part not in TOP:  # it brings in everything, and takes seconds
        yield from (module for module in imports(name) if module == "vitrel")
    above = set(CORE[: CORE.index(part)]) if part in CORE else set(CORE) | ROOMS[part] if part in ROOMS else set()
    for module in imports(name):
        words = module.split(".")
        ours = words[0] == "vitrel" and len(words) > 1 and part not in TOP
        if (
            module.startswith(".")  # write the whole path
            or (words[0] in ("lightning", "pytorch_lightning") and part not in ("train", "tools"))
            or (words[0] in ("albumentations", "cv2") and name != "vitrel/data/augment.py")
            or (name.startswith("vitrel/") and words[0] in ("tools", "examples", "tests"))  # not installed with it
            or (ours and words[1] not in SHARED | {part} | above)
        ):
            yield module


@pytest.mark.slow
def test_import_direction():
    assert {name: wrong for name in sources() if (wrong := [*misplaced(name)])} == {}


def test_no_circle_of_imports():
    """Not even for types: the names that a module needs stand before it."""
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
        for name in sources()
        if name.startswith("vitrel/")
    }
    needs = {name: set() for name in modules}
    for name, file in modules.items():
        for node in import_statements(file):
            if isinstance(node, ast.Import):
                needs[name] |= {alias.name for alias in node.names}
            else:
                needs[name] |= {m if (m := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names}
    left = set(modules)
    while free := {name for name in left if not needs[name] & (left - {name})}:
        left -= free
    assert left == set()


def test_position_imports_nothing_but_torch_and_the_grid():
    known = {"torch", "vitrel", "abc", "collections", "typing", "math", "inspect", "contextlib", "functools", "warnings"}
    for name in sources():
        if name.startswith("vitrel/position/"):
            assert {module.split(".")[0] for module in imports(name)} <= known, name


def undocumented(name):
    """Public names of a file without a docstring, or with arguments or results without a type."""
    tree = trees()[name]
    if ast.get_docstring(tree) is None:
        yield "the file"
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield node.name
        for function in statements(node):
            if not isinstance(function, ast.FunctionDef) or any(
                "jit" in ast.unparse(decorator) for decorator in function.decorator_list
            ):
                continue  # a kernel's arguments are pointers and numbers of its own language
            arguments = [a for a in function.args.args + function.args.kwonlyargs if a.arg not in ("self", "cls")]
            arguments += [function.args.vararg] if function.args.vararg else []
            missing = [a.arg for a in arguments if a.annotation is None]
            if function.returns is None and function.name != "__init__":
                missing.append("return")
            if missing and (not function.name.startswith("_") or function.name == "__init__"):
                yield f"{function.name} {missing}"


def test_public_names_are_documented_and_typed():
    ours = (name for name in sources() if name.startswith("vitrel/"))
    assert {name: wrong for name in ours if (wrong := [*undocumented(name)])} == {}


def described(docstring):
    """Names in the "Args:" section of a docstring in Google's style, in their order."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    section = takewhile(lambda line: line.startswith("    "), lines[lines.index("Args:") + 1 :] if "Args:" in lines else ())
    return [name[1] for line in section if (name := re.match(r"    (\w+): \S", line))]


def parameters(node):
    """Names of the parameters of a function, or of a class: its fields and the parameters of its __init__."""
    if isinstance(node, ast.ClassDef):
        fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        return fields + [name for init in inits for name in parameters(init)]
    arguments = node.args
    single = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *single)]


PUBLIC = {name: value for name in vitrel.__all__ if callable(value := getattr(vitrel, name))}


@each("name", sorted(name for name, value in PUBLIC.items() if not hasattr(value, "_fields")))
def test_public_functions_and_classes_describe_every_argument(name):
    names = [*inspect.signature(PUBLIC[name]).parameters]
    if len(names) > 1:
        assert names in (described(PUBLIC[name].__doc__), described(PUBLIC[name].__init__.__doc__))


@each("key", sorted(vitrel.POSITIONS))
def test_encodings_describe_every_option(key):
    """All have grid, num_heads, head_dim, device and dtype, which `create_position` describes."""
    signature = inspect.signature(vitrel.POSITIONS[key]).parameters.values()
    assert described(vitrel.POSITIONS[key].__doc__) == [p.name for p in signature if p.kind is p.KEYWORD_ONLY]


def test_described_arguments_exist():
    """A docstring does not describe an argument that was renamed or removed."""
    wrong = {}
    for name, tree in trees().items():
        for node in (n for n in statements(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef)):
            if unknown := {*described(ast.get_docstring(node))} - {*parameters(node)}:
                wrong[f"{name}: {node.name}"] = unknown
    assert wrong == {}
