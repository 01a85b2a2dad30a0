"""Does an exported model compute what was trained?"""
