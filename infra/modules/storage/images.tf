resource "aws_ecr_repository" "images" {
  name                 = var.name
  image_tag_mutability = "IMMUTABLE" # a tag names one image for ever; jobs name them by digest
  force_delete         = var.force_destroy

  image_scanning_configuration {
    scan_on_push = true
  }

  encryption_configuration {
    encryption_type = "KMS"
    kms_key         = aws_kms_key.this.arn
  }
}

# Tagged images stay: a job definition may name any of them by digest.
resource "aws_ecr_lifecycle_policy" "images" {
  repository = aws_ecr_repository.images.name

  policy = jsonencode({
    rules = [{
      rulePriority = 1
      description  = "layers of interrupted pushes"
      selection    = { tagStatus = "untagged", countType = "sinceImagePushed", countUnit = "days", countNumber = 14 }
      action       = { type = "expire" }
    }]
  })
}
