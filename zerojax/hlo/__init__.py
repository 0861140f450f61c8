"""Reader of compiled programs: every collective with axes, dtype, bytes, executions and schedule.

Imports nothing of zerojax; hands on `CompiledProgram`.
"""
