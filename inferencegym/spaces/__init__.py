"""Actions and observations as arrays: bounds, conversions and formats, the same for local and remote environments.

``actions`` and ``observations`` convert between dataclasses and rows of numbers, ``knobs`` is the compiled part, and
``formats`` has the formats for learners with their Gymnasium spaces: ``"box"``, ``"natural"`` or ``"discrete"``
actions, ``"raw"``, ``"normalised"``, ``"scheduled"`` or ``"full"`` observations. Needs numpy and no simulator.
"""
