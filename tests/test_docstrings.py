"""Everything that `taskharbor` exports has a docstring, so that an editor can show one."""

import inspect

import taskharbor


def _undocumented(name: str, value: object) -> list[str]:
    missing = [name] if not inspect.getdoc(value) else []
    if not inspect.isclass(value):
        return missing
    for member, found in vars(value).items():
        function = getattr(found, "fget", None) or getattr(found, "__func__", found)
        if not member.startswith("_") and inspect.isfunction(function) and not function.__doc__:
            missing.append(f"{name}.{member}")
    return missing


def test_public_names_have_docstrings() -> None:
    exported = {name: getattr(taskharbor, name) for name in taskharbor.__all__}
    documented = {
        name: one for name, one in exported.items() if inspect.isclass(one) or inspect.isfunction(one)
    }
    assert [missing for name, one in documented.items() for missing in _undocumented(name, one)] == []
