"""What each array leaf becomes: which dim is split over which mesh axes, why, and the stored form that follows.

Knows meshes, shapes and the configuration; hands on `Placement` (one leaf) and `Layout` (a tree of them on a mesh),
which the runtime executes and the planner reads.
"""
