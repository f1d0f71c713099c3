"""What commands share: options, questions, error lines, and photos one after the other. Each part of the package has its own commands."""
