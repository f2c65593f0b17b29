"""Tool calls in the text of an answer: one file for each format that models were trained to write them in."""
