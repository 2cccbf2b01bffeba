"""Do the things that are said about output heads hold here, at small size?"""
