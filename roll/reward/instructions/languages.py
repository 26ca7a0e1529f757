"""Recognises languages by their script: languages in Latin script cannot be distinguished this way.

Languages that share a script (Hindi, Marathi and Nepali, say) are not distinguished either.
"""

from __future__ import annotations

import unicodedata

_SCRIPTS = {
    "am": "ETHIOPIC",
    "ar": "ARABIC",
    "be": "CYRILLIC",
    "bg": "CYRILLIC",
    "bn": "BENGALI",
    "el": "GREEK",
    "fa": "ARABIC",
    "gu": "GUJARATI",
    "he": "HEBREW",
    "hi": "DEVANAGARI",
    "hy": "ARMENIAN",
    "ja": "HIRAGANA",
    "ka": "GEORGIAN",
    "kn": "KANNADA",
    "ko": "HANGUL",
    "ml": "MALAYALAM",
    "mr": "DEVANAGARI",
    "my": "MYANMAR",
    "ne": "DEVANAGARI",
    "pa": "GURMUKHI",
    "ru": "CYRILLIC",
    "si": "SINHALA",
    "sr": "CYRILLIC",
    "ta": "TAMIL",
    "te": "TELUGU",
    "th": "THAI",
    "uk": "CYRILLIC",
    "ur": "ARABIC",
    "zh": "CJK",
}
_FURTHER_SCRIPTS = {"ja": ("HIRAGANA", "KATAKANA", "CJK")}
"""Further scripts of a language."""


def is_written_in(text: str, language: str) -> bool:
    """Whether more than half of the letters are of the language's script. Raises `ValueError` if the script is
    ambiguous."""
    if language not in _SCRIPTS:
        raise ValueError(
            f"language {language!r} cannot be recognised by its script; languages that can: {', '.join(_SCRIPTS)}"
        )
    letters = [unicodedata.name(character, "") for character in text if character.isalpha()]
    script = _SCRIPTS[language]
    scripts = _FURTHER_SCRIPTS.get(language, (script,))
    return any(name.startswith(script) for name in letters) and (
        sum(name.startswith(scripts) for name in letters) * 2 > len(letters)
    )
