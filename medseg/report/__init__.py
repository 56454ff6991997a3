"""Reports over many runs: what differed, what each difference bought, drawn into one page."""
