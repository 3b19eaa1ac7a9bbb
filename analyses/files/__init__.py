"""What is written and read: whole folders and files, tables, LaTeX."""
