"""Finds the formulas in docstrings, which are written to be read in a terminal, and sets them in TeX.

What stands between blanks outside of brackets is a unit: ``λ_i``, ``f_i(x_i)``, ``(w − z)``, ``←`` or a word. Units
that belong to formulas and follow each other, with one blank between them, are one formula.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

FUNCTIONS = ("min", "max", "exp", "log", "clip", "mean", "sign", "prox")
"""Words that belong to a formula where they are applied: ``max(0, δ)``, ``min_w``, ``= mean w_i``."""
OPERATORS = {
    "=": "=", "<": "<", ">": ">", "+": "+", "/": "/", "−": "-", "≤": r"\le", "≥": r"\ge", "≠": r"\ne", "±": r"\pm",
    "←": r"\leftarrow", "∈": r"\in", "·": r"\cdot", "×": r"\times", "≡": r"\equiv", "→": r"\to",
}  # fmt: skip
BRACKETS = {"(": ")", "[": "])", "{": "}", "⟨": "⟩", "‖": "‖", "|": "|"}
"""What closes each bracket; an interval may be open at its end."""
SIGNS = {
    "∇": r"\nabla ", "∂": r"\partial ", "Σ": r"\sum ", "∞": r"\infty ", "⟨": r"\langle ", "⟩": r"\rangle ",
    "{": r"\{", "}": r"\}", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\varepsilon ",
    "η": r"\eta ", "θ": r"\theta ", "κ": r"\kappa ", "λ": r"\lambda ", "μ": r"\mu ", "ν": r"\nu ", "ρ": r"\rho ",
    "σ": r"\sigma ", "τ": r"\tau ", "φ": r"\varphi ", "Δ": r"\Delta ", "Ψ": r"\Psi ",
}  # fmt: skip
SCRIPTS = {**dict(zip("⁰¹²³⁺ᵀ", "0123+T", strict=True)), **dict(zip("₀₁₂₃", "0123", strict=True))}
ACCENTS = {"\u0304": r"\bar", "\u0303": r"\tilde"}
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?!\w)|\d+(?=[A-Zα-ω(√])")
_POWER_OF_TEN = re.compile(r"1e-(\d)")
_NAME = re.compile(rf"({'|'.join(FUNCTIONS)})(?=[({{_])|(Np|wd)(?!\w)|(loss)(?=_)")
_LETTER, _INDEXED = re.compile(r"[A-Za-z](?![A-Za-z\d])"), re.compile(r"([a-z])(\d)(?!\w)")
_SUBSCRIPT = re.compile(r"\d+|(?:min|max|con|prev)(?![a-z])|[A-Za-z]{1,2}(?![A-Za-z])|[\u0391-ω]")
_WORD = r"\text{ "
_ARTICLES = ("a", "A", "I")
Unit = tuple[str, str]
"""A unit as it is written, and in TeX."""


def set_formulas(text: str, prose: Callable[[str], str]) -> str:
    r"""Return the text with formulas as ``$TeX$``, and all else as ``prose`` gives it.

    Example:
        >>> print(set_formulas("a step from z:  z ← z + α / N Σ λ_i (w_i − z)  (old λ_i)", str))
        a step from $z$: $z \leftarrow z + \frac{\alpha }{N} \sum \lambda_{i} (w_{i} - z)$ (old $\lambda_{i}$)
    """
    out, run, blank = list[str](), list[Unit](), ""

    def end(rest: str) -> None:
        is_formula = any(re.search(r"[^\W\d]|\^", unit) and unit not in _ARTICLES for unit, _ in run) or (
            len(run) > 1 and any(unit in _ARTICLES for unit, _ in run)
        )
        out.append(f"${_join(run)}$" if is_formula else prose(" ".join(unit for unit, _ in run)))
        out.append(rest)
        run.clear()

    for unit, mark, blank in _units(text):
        tex = _tex(unit, run[-1][0] if run else "")
        alone = unit not in OPERATORS and bool(run) and run[-1][0] not in OPERATORS
        if run and (tex is None or (alone and (unit in _ARTICLES or unit[0].isdigit() or run == [("a", "a")]))):
            end(" ")
        if tex is None:
            inner = unit[1:-1] if _is_group(unit) else None
            words = prose(unit) if inner is None else unit[0] + set_formulas(inner, prose) + unit[-1]
            out.append(words + prose(mark) + blank[:1])
            continue
        run.append((unit, tex))
        if mark or len(blank) != 1:
            end(prose(mark) + blank[:1])
    if run:
        end(blank)
    return "".join(out)


def _units(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield each unit, the mark behind it, and the blanks behind that."""
    start = place = 0
    while place <= len(text):
        if place < len(text) and not text[place].isspace():
            place = (_close(text, place) or place) + 1
            continue
        end = place + len(text[place:]) - len(text[place:].lstrip())
        unit, blank = text[start:place], text[place:end]
        core = re.sub(r"('s)?[.,;:]*$", "", unit) or unit
        if unit or blank:
            yield core, unit[len(core) :], blank
        start, place = end, max(end, place + 1)


def _close(text: str, place: int) -> int | None:
    """Return the place of the bracket that closes the one at a place, None if there is none or nothing closes it."""
    still_open: list[str] = []
    for i in range(place, len(text)):
        if still_open and text[i] in BRACKETS[still_open[-1]]:
            still_open.pop()
        elif text[i] in BRACKETS:
            still_open.append(text[i])
        if not still_open:
            return i if i > place else None
    return None


def _is_group(unit: str) -> bool:
    return bool(unit) and _close(unit, 0) == len(unit) - 1


def _tex(unit: str, before: str = "=") -> str | None:
    """Return a unit in TeX, None if it is prose."""
    if unit in OPERATORS:
        return OPERATORS[unit]
    if unit in FUNCTIONS:
        return _function(unit) if before in OPERATORS else None
    out, place = "", 0
    while place < len(unit):
        found = _atom(unit, place)
        if found is None:
            return None
        out, place = out + found[0], found[1]
    return out or None


def _atom(unit: str, place: int) -> tuple[str, int] | None:
    """Return what stands at a place in TeX, with its indices, and the place behind it."""
    sign, end = unit[place], place + 1
    if (close := _close(unit, place)) is not None:
        inner = _inside(unit[place + 1 : close], takes_words=place > 0)
        left, right = (_bracket(unit[i], i == place) for i in (place, close))
        base, end = None if inner is None else left + inner + right, close + 1
    elif match := _POWER_OF_TEN.match(unit, place):
        base, end = f"10^{{-{match[1]}}}", match.end()
    elif match := _NUMBER.match(unit, place):
        base, end = match[0], match.end()
    elif match := _NAME.match(unit, place):
        base, end = _function(match[0]), match.end()
    elif sign == "√" and end < len(unit) and (under := _atom(unit, end)):
        base, end = rf"\sqrt{{{under[0]}}}", under[1]
    elif match := _INDEXED.match(unit, place):
        base, end = f"{match[1]}_{{{match[2]}}}", match.end()
    elif match := _LETTER.match(unit, place):
        base = match[0]
    else:
        base = SIGNS.get(sign) or (f" {OPERATORS[sign]} " if sign in OPERATORS else None)
    if base is None:
        return None
    if accent := ACCENTS.get(unit[end : end + 1]):
        base, end = rf"{accent}{{{base.strip()}}}", end + 1
    return _with_indices(base, unit, end)


def _with_indices(base: str, unit: str, end: int) -> tuple[str, int] | None:
    """Return an atom with the indices and powers that follow it, and the place behind them."""
    indices = {"_": "", "^": ""}
    while end < len(unit):
        sign = unit[end]
        if sign in SCRIPTS:
            indices["^" if sign in "⁰¹²³⁺ᵀ" else "_"] += SCRIPTS[sign]
            end += 1
        elif sign in "'*":
            indices["^"] += r"\prime " if sign == "'" else sign
            end += 1
        elif sign in indices and (close := _close(unit, end + 1)):
            inner = _inside(unit[end + 2 : close], takes_words=True)
            if inner is None:
                return None
            indices[sign] += inner
            end = close + 1
        elif sign == "_" and (match := _SUBSCRIPT.match(unit, end + 1)):
            is_word = len(match[0]) > 2 and not match[0].isdigit()
            indices[sign] += rf"\text{{{match[0]}}}" if is_word else SIGNS.get(match[0], match[0])
            end = match.end()
        elif sign == "^":
            minus = unit[end + 1 : end + 2] == "−"
            power = _atom(unit, end + 1 + minus) if end + 1 + minus < len(unit) else None
            if power is None:
                return None
            indices[sign] += "-" * minus + power[0]
            end = power[1]
        else:
            break
    return (base.rstrip() if any(indices.values()) else base) + "".join(
        f"{sign}{{{text.strip()}}}" for sign, text in indices.items() if text
    ), end


def _inside(text: str, *, takes_words: bool) -> str | None:
    """Return what stands in brackets in TeX; None if there are words, and they are not taken."""
    out, run = [], list[Unit]()
    for unit, mark, _ in _units(text):
        tex = _tex(unit)
        if tex is None and unit and not takes_words:
            return None
        if unit:
            run.append((unit, rf"{_WORD}{unit} }}" if tex is None else tex))
        if mark:
            out.append(_join(run) + mark + " ")
            run.clear()
    return ("".join(out) + _join(run)).strip() or None


def _join(units: list[Unit]) -> str:
    """Return successive units as one formula, with fractions; a sum takes all factors behind it."""
    done: list[Unit] = []
    rest = list(units)
    while rest:
        unit, tex = rest.pop(0)
        if unit != "/" or not done or not rest or done[-1][0] in OPERATORS or rest[0][1].startswith(_WORD):
            done.append((unit, tex))
            continue
        top, bottom = [done.pop()], [rest.pop(0)]
        while bottom[0][0].startswith("Σ") and done and done[-1][0] not in OPERATORS:
            top.insert(0, done.pop())
        while bottom[0][0].startswith("Σ") and rest and rest[0][0] not in OPERATORS:
            bottom.append(rest.pop(0))
        parts = (_bare(part[0]) if len(part) == 1 else " ".join(tex for _, tex in part) for part in (top, bottom))
        done.append(("fraction", r"\frac{{{}}}{{{}}}".format(*parts)))
    return re.sub(r" {2,}", " ", " ".join(tex for _, tex in done)).strip()


def _bare(unit: Unit) -> str:
    """Return the TeX of a unit without the round brackets around all of it."""
    return unit[1].removeprefix("(").removesuffix(")") if unit[0][0] == "(" and _is_group(unit[0]) else unit[1]


def _bracket(sign: str, is_left: bool) -> str:
    side = "l" if is_left else "r"
    return {"‖": rf"\{side}Vert ", "|": rf"\{side}vert "}.get(sign) or SIGNS.get(sign, sign)


def _function(name: str) -> str:
    if name in FUNCTIONS[:4]:
        return rf"\{name} "
    return name if name == "Np" else rf"\operatorname{{{name}}}"
