"""Write speakers/: SPEAKER/VOWEL-NUMBER.wav, five vowels spoken by four speakers, 8 kHz, 16 bits, a quarter of a second each.

No recordings come with the packages that fedselect needs, so these are synthetic: pulses of a speaker's pitch through three
resonances, which are what makes a vowel. Speakers differ as people do: in pitch, in the length of their throat, which moves the
resonances, and in the noise around them.
"""

import wave
from pathlib import Path

import numpy as np
from scipy.signal import lfilter

RATE = 8000
VOWELS = {"a": (730, 1090, 2440), "e": (530, 1840, 2480), "i": (270, 2290, 3010), "o": (570, 840, 2410), "u": (300, 870, 2240)}
SPEAKERS, EACH = 4, 6


def spoken(vowel: str, pitch: float, throat: float, noise: float, draw: np.random.Generator) -> np.ndarray:
    turns = np.cumsum(pitch * draw.uniform(0.95, 1.05) * (1 + 0.05 * np.linspace(0, draw.normal(), RATE // 4)) / RATE)
    sound = np.diff(np.floor(turns), prepend=0.0) + 0.02 * draw.normal(size=len(turns))  # a pulse for each turn, and breath
    for centre in VOWELS[vowel]:
        angle, width = 2 * np.pi * centre * throat * draw.uniform(0.85, 1.15) / RATE, np.exp(-np.pi * 80 / RATE)
        sound = lfilter([1.0], [1.0, -2 * width * np.cos(angle), width**2], sound)
    return sound / np.abs(sound).max() + noise * draw.normal(size=len(sound))


def main(folder: Path = Path("speakers")) -> None:
    draw = np.random.default_rng(0)
    for speaker in range(SPEAKERS):
        pitch, throat, noise = draw.uniform(90, 250), draw.uniform(0.85, 1.2), draw.uniform(0.05, 0.4)
        place = folder / f"speaker-{speaker}"
        place.mkdir(parents=True, exist_ok=True)
        for vowel in VOWELS:
            for i in range(EACH):
                sound = 20_000 * np.clip(spoken(vowel, pitch, throat, noise, draw), -1.5, 1.5)
                with wave.open(str(place / f"{vowel}-{i}.wav"), "wb") as file:
                    file.setparams((1, 2, RATE, 0, "NONE", ""))
                    file.writeframes(sound.astype("<i2").tobytes())


if __name__ == "__main__":
    main()
