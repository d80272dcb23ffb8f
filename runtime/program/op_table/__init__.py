"""What a row of the op table is made of, and rows that are a chapter of their own."""
