"""The public names with their parameters and defaults, as text that can be compared.

``python -m tests.face`` prints those of the installed version.
"""

import inspect
import json

import natgrad

# What users call; the methods of curvatures, clocks and layers are called by natgrad.
CALLED = (
    "Preconditioner",
    "PreconditionedOptimizer",
    "NaturalMuon",
    "DASO",
)


def shown(value):
    text = repr(value)
    return "an object" if " at 0x" in text else text


def parameters(function):
    """Return the default of each parameter, by name; "" where there is none."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return {}
    return {
        name: "" if parameter.default is parameter.empty else shown(parameter.default)
        for name, parameter in signature.parameters.items()
    }


def face():
    """Return the parameters of everything that can be called, by its name."""
    found = {}
    for name in sorted(natgrad.__all__):
        value = getattr(natgrad, name)
        found[name] = parameters(value) if callable(value) else {}
        if name in CALLED:
            for method, function in inspect.getmembers(value, inspect.isfunction):
                if not method.startswith("_") and function.__module__.startswith("natgrad"):
                    found[f"{name}.{method}"] = parameters(function)
        if inspect.ismodule(value):
            for inner in getattr(value, "__all__", ()):
                found[f"{name}.{inner}"] = parameters(getattr(value, inner))
    return found


if __name__ == "__main__":
    print(json.dumps(face(), indent=1))
