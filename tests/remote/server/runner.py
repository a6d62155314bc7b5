#!/usr/bin/env python
"""Stands where ndif's sandbox expects a Python interpreter: repairs nnsight, then runs the module it was asked for."""

import runpy
import sys

import repair  # noqa: F401

del sys.path[0]  # this folder: what a request runs sees the installed packages and nothing else
_, _, module, *rest = sys.argv  # "-m", the module, its arguments
sys.argv = [module, *rest]
runpy.run_module(module, run_name="__main__", alter_sys=True)
