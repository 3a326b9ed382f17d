"""Numbers: their dtypes, their products, symmetric ones as triangles, and bases and inverses made of earlier ones."""
