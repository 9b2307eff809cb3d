"""A school: students, teachers, courses and marks.

Owns: :data:`SCHOOL`.
"""

from __future__ import annotations

import random
from datetime import date
from typing import Final

from turnwise.envs.sql.schema import Rows, Schema, Template, day, people, titles

_DEPARTMENTS: Final = ("arts", "languages", "mathematics", "sciences", "sports")
_TERMS: Final = ("2023-autumn", "2024-spring", "2024-autumn")
_LEVELS: Final = ("Advanced", "Applied", "Basic", "Classic", "General", "Modern", "Practical", "Short")
_SUBJECTS: Final = ("Biology", "Chess", "Drawing", "Geometry", "Latin", "Music", "Optics", "Rowing", "Statistics")


def _rows(rng: random.Random) -> Rows:
    names = people(rng, 160)
    teachers = [(number, name, rng.choice(_DEPARTMENTS)) for number, name in enumerate(names[:18], 1)]
    students = [
        (number, name, rng.randint(7, 12), day(rng, date(2006, 1, 1), date(2011, 12, 31)))
        for number, name in enumerate(names[18:], 1)
    ]
    courses = [
        (number, title, rng.randint(1, 16), rng.choice((2, 3, 4, 6)))
        for number, title in enumerate(titles(rng, 30, _LEVELS, _SUBJECTS), 1)
    ]
    enrolments = []
    for term in _TERMS:
        for student in students:
            for course in rng.sample(courses[:28], rng.choice((0, 1, 2, 3, 3))):
                # Without a mark: dropped out.
                mark = None if rng.random() < 0.08 else rng.randint(2, 20) / 2
                enrolments.append((student[0], course[0], term, mark))
    return {"teachers": teachers, "students": students, "courses": courses, "enrolments": enrolments}


SCHOOL: Final = Schema(
    name="school",
    tables="""
CREATE TABLE teachers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, department TEXT NOT NULL);
CREATE TABLE students (id INTEGER PRIMARY KEY, name TEXT NOT NULL, grade INTEGER NOT NULL, born_on TEXT NOT NULL);
CREATE TABLE courses (id INTEGER PRIMARY KEY, title TEXT NOT NULL, teacher_id INTEGER NOT NULL REFERENCES teachers(id),
    credits INTEGER NOT NULL);
CREATE TABLE enrolments (student_id INTEGER NOT NULL REFERENCES students(id), course_id INTEGER NOT NULL
    REFERENCES courses(id), term TEXT NOT NULL, mark REAL, PRIMARY KEY (student_id, course_id, term));
""",
    rows=_rows,
    templates=(
        Template(
            "What is the average mark of the students of grade {grade} in the term {term}, rounded to two decimals? "
            "Enrolments without a mark do not count.",
            "SELECT ROUND(AVG(e.mark), 2) FROM enrolments e JOIN students s ON s.id = e.student_id "
            "WHERE s.grade = {grade} AND e.term = '{term}'",
            {"grade": (7, 8, 9, 10, 11, 12), "term": _TERMS},
        ),
        Template(
            "For each department: how many courses do its teachers teach? Only departments with at least {count} "
            "courses; give department and number, in the order of the departments.",
            "SELECT t.department, COUNT(*) FROM teachers t JOIN courses c ON c.teacher_id = t.id "
            "GROUP BY t.department HAVING COUNT(*) >= {count} ORDER BY t.department",
            {"count": (2, 3, 4, 5, 6)},
        ),
        Template(
            "Which teachers of the department {department} teach no course? Give their names.",
            "SELECT t.name FROM teachers t LEFT JOIN courses c ON c.teacher_id = t.id "
            "WHERE t.department = '{department}' AND c.id IS NULL",
            {"department": _DEPARTMENTS},
        ),
        Template(
            "Which students of grade {grade} were enrolled in no course in the term {term}? Give their names.",
            "SELECT name FROM students WHERE grade = {grade} AND id NOT IN "
            "(SELECT student_id FROM enrolments WHERE term = '{term}')",
            {"grade": (7, 8, 9, 10, 11, 12), "term": _TERMS},
        ),
        Template(
            "Which courses had more than {count} enrolments in the term {term}? Give title, name of the teacher and "
            "number of enrolments.",
            "SELECT c.title, t.name, COUNT(*) FROM courses c JOIN teachers t ON t.id = c.teacher_id "
            "JOIN enrolments e ON e.course_id = c.id WHERE e.term = '{term}' GROUP BY c.id HAVING COUNT(*) > {count}",
            {"count": (8, 9, 10, 11, 12), "term": _TERMS},
        ),
        Template(
            "How many credits did each student of grade {grade} earn over all terms? A course counts where its mark is "
            "at least 5. Give name and credits of those with at least one credit, the most first (ties by name).",
            "SELECT s.name, SUM(c.credits) AS earned FROM students s JOIN enrolments e ON e.student_id = s.id "
            "JOIN courses c ON c.id = e.course_id WHERE s.grade = {grade} AND e.mark >= 5 GROUP BY s.id "
            "ORDER BY earned DESC, s.name",
            {"grade": (7, 8, 9, 10, 11, 12)},
        ),
        Template(
            "Who are the students born in {year} whose average mark over all terms is above the average of all marks? "
            "Give their names.",
            "SELECT s.name FROM students s JOIN enrolments e ON e.student_id = s.id WHERE s.born_on LIKE '{year}-%' "
            "GROUP BY s.id HAVING AVG(e.mark) > (SELECT AVG(mark) FROM enrolments)",
            {"year": (2006, 2007, 2008, 2009, 2010, 2011)},
        ),
    ),
)
