"""THE BORDER: what front ends ask of an engine, in this process or in one of its own. Messages carry token ids; text
stays outside.
"""
