# The workspace: data, checkpoints, models, vectors, compiled graphs, records of jobs.

locals {
  bucket     = "${var.name}-${var.account_id}-${var.region}"
  bucket_arn = "arn:aws:s3:::${local.bucket}"
}

resource "aws_s3_bucket" "workspace" {
  #checkov:skip=CKV_AWS_18: who read what is CloudTrail's to record, for the whole account; a log bucket per pipeline would double every request
  #checkov:skip=CKV_AWS_144: a cycle can be run again from its inputs; another region has neither the Trainium fleet nor the SLA
  #checkov:skip=CKV2_AWS_62: nobody waits for objects; cycles are started by the schedule
  bucket        = local.bucket
  force_destroy = var.force_destroy
}

resource "aws_s3_bucket_ownership_controls" "workspace" {
  bucket = aws_s3_bucket.workspace.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_public_access_block" "workspace" {
  bucket                  = aws_s3_bucket.workspace.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "workspace" {
  bucket = aws_s3_bucket.workspace.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "workspace" {
  bucket = aws_s3_bucket.workspace.id

  rule {
    bucket_key_enabled = true # one call to KMS for many objects

    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.this.arn
    }
  }
}

# What a cycle publishes is deleted by nobody but its owner (retention of checkpoints is the pipeline's own); here goes
# only what nobody can read any more.
resource "aws_s3_bucket_lifecycle_configuration" "workspace" {
  bucket = aws_s3_bucket.workspace.id

  rule {
    id     = "unfinished-uploads"
    status = "Enabled"
    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }

  rule {
    id     = "old-versions"
    status = "Enabled"
    filter {}

    noncurrent_version_expiration {
      noncurrent_days = 90
    }

    expiration {
      expired_object_delete_marker = true
    }
  }

  depends_on = [aws_s3_bucket_versioning.workspace]
}

resource "aws_s3_bucket_policy" "workspace" {
  count = var.emulator ? 0 : 1 # the emulator passes over conditions, so that everybody would be denied

  bucket = aws_s3_bucket.workspace.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "OnlyTls"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:*"
        Resource  = [local.bucket_arn, "${local.bucket_arn}/*"]
        Condition = { Bool = { "aws:SecureTransport" = "false" } }
      },
      {
        Sid       = "OnlyThisAccount"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:*"
        Resource  = [local.bucket_arn, "${local.bucket_arn}/*"]
        Condition = {
          StringNotEquals = { "aws:PrincipalAccount" = var.account_id }
          BoolIfExists    = { "aws:PrincipalIsAWSService" = "false" }
        }
      },
    ]
  })

  depends_on = [aws_s3_bucket_public_access_block.workspace] # S3 refuses the two at once
}
