"""Actions and observations as arrays: bounds, conversions and formats, the same for local and remote environments.

``actions`` and ``observations`` convert between dataclasses and rows of numbers, ``knobs`` is the compiled part, and
``formats`` holds what learners choose from: ``"box"``, ``"natural"`` or ``"discrete"`` actions, ``"raw"``,
``"normalised"`` or ``"scheduled"`` observations, with their Gymnasium spaces. Needs numpy and no simulator.
"""
