"""Measures configurations on the machines at hand with the user's own step: time, exposed communication, errors.

`pilot` is its face; it hands on a report with the configuration to use. Where there are no machines yet, `planner`
predicts.
"""
