"""The page: a model at work in a browser. Plain JavaScript and CSS, served as they lie here."""
