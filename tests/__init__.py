"""Tests of steadykv; `make test` runs them all on the CPU."""
