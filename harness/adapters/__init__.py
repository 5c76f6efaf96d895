"""Adapters that run other people's trainers unchanged: `harness run --run URL -- script.py` finds
out which one a script uses, and adapts it (docs/trainers/).

Nothing here imports a framework that the script has not imported.
"""
