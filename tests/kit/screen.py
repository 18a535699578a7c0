"""A terminal, as far as our programs use one: what stands on it after some output."""

import re

_PIECES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """`lines`: without spaces at their ends. A line feed also returns; a longer line goes on in the next."""

    def __init__(self, output: str, columns: int = 80) -> None:
        self.lines, self.has_cursor, row, column = [""], True, 0, 0
        for count, command, control, text in _PIECES.findall(output):
            if command == "A":
                row = max(0, row - int(count or 1))
            elif command == "K":
                assert count == "2", output
                self.lines[row] = ""
            elif command in ("h", "l"):
                assert count == "?25", output
                self.has_cursor = command == "h"
            elif control:
                row, column = row + (control == "\n"), 0
            assert command in ("A", "K", "h", "l", "m", ""), output
            for character in text:
                if column == columns:
                    row, column = row + 1, 0
                self.lines += [""] * (row + 1 - len(self.lines))
                line = self.lines[row].ljust(column)
                self.lines[row] = line[:column] + character + line[column + 1 :]
                column += 1
            self.lines += [""] * (row + 1 - len(self.lines))
        self.lines = [line.rstrip() for line in self.lines]
