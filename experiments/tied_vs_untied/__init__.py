"""Does a model gain by an output matrix of its own, or is the input embedding enough?"""
