"""One module for each part of `make gpu`; its function `run(bench)` does the part."""
