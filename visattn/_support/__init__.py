"""What every room uses: checks, files, types, tables. Imports nothing of the package but its errors."""
