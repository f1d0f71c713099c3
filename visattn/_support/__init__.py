"""Helpers shared by all subpackages: checks, files, types, tables. They import nothing from the package except its errors."""
