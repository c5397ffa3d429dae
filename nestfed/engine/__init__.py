"""Where it runs: one meaning of a round (`sync`), and the engines that carry it out."""
