"""Rows of numbers, and whether their sum is positive: what scripts of the tests train on."""

from support import trainer_parts


class Numbers(trainer_parts.Numbers):
    fingerprint = "numbers"

    def __init__(self):
        super().__init__(500)
